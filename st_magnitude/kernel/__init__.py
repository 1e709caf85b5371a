"""infonce, the kernel of every contrastive loss, plain and in tiles."""
