"""Do the papers' claims hold? One module a claim; ``python -m reproduction`` runs them (scripts/reproduce)."""
