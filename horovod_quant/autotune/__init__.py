"""How `Auto` finds the fastest method: what it tries, and how it decides."""
