//! The one executable: dispatches on the role.
fn main() {}
