"""Speed, data and studies: the scripts behind the figures of the README and the docs."""
