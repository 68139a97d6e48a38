"""Tests on several pretend hosts, which are network namespaces; they need root."""
