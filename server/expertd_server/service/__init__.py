"""What all transports share: admission, checks of a request, answers."""
