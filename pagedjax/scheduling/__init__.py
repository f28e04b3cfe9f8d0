"""What runs next and what of its KV is in the pool: requests, their groups, and the scheduler. Host only."""
