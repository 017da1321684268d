"""What all transports share: admission, checks of a request, the way of an answer."""
