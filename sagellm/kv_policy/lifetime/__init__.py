"""For how long a block will be of use."""
