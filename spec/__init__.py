"""Text generation: sampling, stopping, speculators, verification and the loop that joins them."""
