"""From raw logits to the distribution a request asked for, and draws from it; batched over rows."""
