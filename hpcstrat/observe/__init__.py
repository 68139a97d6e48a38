"""What a job shows of itself: timelines, clocks, and how long replicas waited."""
