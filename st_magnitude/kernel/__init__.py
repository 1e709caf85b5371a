"""infonce, the kernel of every contrastive loss: terms, tiles, and the ring of several
processes."""
