"""Makes requests and sends them on time: arrivals, prompts, and a client in a process of its own."""
