//! Reliable messaging on the client side.
