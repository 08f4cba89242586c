"""Agent loops: how one prompt becomes one trajectory."""
