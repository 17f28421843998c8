"""What tables share: steps of models, the peers of attention, turns between them."""
