"""For each op what `onchip bench` runs: its steps and its peers."""
