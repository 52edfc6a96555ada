"""``python -m whyformer`` runs the ``whyformer`` command."""

from whyformer.apps.cli import main

if __name__ == "__main__":
    main()
