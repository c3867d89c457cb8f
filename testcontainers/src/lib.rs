#![doc = "Services for tests."]
