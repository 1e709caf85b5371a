"""infonce, the kernel of every contrastive loss: plain, in tiles, and in a ring of processes."""
