"""Tests of hpcstrat/tools/job_scripts."""
