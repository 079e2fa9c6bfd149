"""Which cached blocks to give up, which to move between tiers, and how long each will be of use."""
