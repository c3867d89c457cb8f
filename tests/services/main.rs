//! Tests against real services, one binary so that each service starts once.

mod kafka;
