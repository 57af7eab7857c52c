"""What the front ends of all ops share: checks of options and arguments, autograd, derivative rules."""
