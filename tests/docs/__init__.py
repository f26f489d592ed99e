"""What the pages show is run, compared or checked: every fenced block has an account (`test_accounts.py`)."""
