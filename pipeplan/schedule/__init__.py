"""What runs when? Programs, their simulation, and what both say of memory and weights."""
