"""Programs of users, for type checkers: jobs/check.sh runs these over them."""
