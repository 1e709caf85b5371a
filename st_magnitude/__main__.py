"""``python -m st_magnitude``: the same as ``st-magnitude``."""

from st_magnitude.commands.app import main

if __name__ == "__main__":
    main()
