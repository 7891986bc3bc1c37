//! [`variant_name`]: returns the name of an enum value's variant, without the fields, for log
//! lines.
use std::fmt::{self, Debug, Write};

/// A `fmt::Write` that keeps the first identifier of the text that is written to it, and ignores
/// the rest.
struct FirstWordWriter(String);

impl Write for FirstWordWriter {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for c in text.chars() {
            if !c.is_alphanumeric() && c != '_' {
                // The error ends the formatting.
                return Err(fmt::Error);
            }
            self.0.push(c);
        }
        Ok(())
    }
}

/// Returns the name of the variant of an enum value, such as `Start`, from its `Debug` output. Does
/// not format the values in the variant, which may be secret.
pub fn variant_name(value: &impl Debug) -> String {
    let mut word = FirstWordWriter(String::new());
    // The error only ends the formatting after the name.
    _ = write!(word, "{value:?}");
    word.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_name_is_formatted() {
        #[derive(Debug)]
        enum Message {
            Hello,
            Key(Secret),
        }
        struct Secret;
        impl Debug for Secret {
            fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
                panic!("a secret is formatted")
            }
        }
        assert_eq!(variant_name(&Message::Hello), "Hello");
        assert_eq!(variant_name(&Message::Key(Secret)), "Key");
    }
}
