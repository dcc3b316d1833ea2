"""The daemon's socket: messages, frames, descriptors, and the user at the other end."""
