"""Which blocks are worth a move between tiers, and what a move costs."""
