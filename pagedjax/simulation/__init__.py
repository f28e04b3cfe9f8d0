"""What an engine of given sizes would do with given traffic: the real scheduler under a virtual clock. Host only."""
