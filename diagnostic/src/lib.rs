//! Crate `diagnostic`: the type of errors, warnings and notes that every crate of the product
//! reports to the user.
//!
//! A [`Diagnostic`] holds a stable [`Code`], a subject, structured fields, help and causes.
//! [`render()`] turns a diagnostic into text for the terminal, and [`Diagnostic::to_json`] into the
//! JSON that `--json` prints. Module [`codes`] declares the codes and their explanations, from
//! which `docs/errors.md` is generated. Module [`terminal_text`] filters text that is printed.
mod code;
mod code_reference;
pub mod codes;
mod diagnostic;
mod location;
pub mod quantity;
mod render;
pub mod terminal_text;

pub use code::{Category, Code, CodeInfo};
pub use code_reference::{render_code_entry, render_code_reference};
pub use diagnostic::{Diagnostic, Result, Severity};
pub use location::Location;
pub use render::{render, render_all};

#[cfg(test)]
mod tests;
