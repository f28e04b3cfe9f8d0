"""What an engine will take of the memory, told before anything large is allocated."""
