"""From features to a head: the objective, the weights it starts from, and the loop around them."""
