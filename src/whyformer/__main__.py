"""``python -m whyformer`` runs the ``whyformer`` command."""

from whyformer.apps.cli import main

main()
