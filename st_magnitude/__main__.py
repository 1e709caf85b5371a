"""``python -m st_magnitude`` runs ``st-magnitude``."""

from st_magnitude.workbench.commands.app import main

if __name__ == "__main__":
    main()
