"""The engine on the CPU: ranks that write and read each other's memory, and TCP between nodes."""
