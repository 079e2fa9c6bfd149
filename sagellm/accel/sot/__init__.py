"""Skeleton-of-thought with speculation: one request is answered as a plan whose points are written side by side."""
