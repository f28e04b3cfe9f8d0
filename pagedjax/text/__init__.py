"""From token ids to text."""
