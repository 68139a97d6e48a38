"""Arrays: what they are, in which library, whose memory, and how they are packed."""
