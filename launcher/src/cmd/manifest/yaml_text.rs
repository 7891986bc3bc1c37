//! [`format_yaml_documents`]: formats JSON values as YAML in the style in which Kubernetes
//! manifests are written by hand.
use jobspec::quote_yaml;
use serde_json::Value;
use std::fmt::Write as _;

/// Formats each value as one YAML document.
pub(super) fn format_yaml_documents(values: &[Value]) -> String {
    let mut text = String::new();
    for value in values {
        text.push_str("---\n");
        append_mapping_or_list(value, 0, &mut text);
    }
    text
}

/// Appends a JSON object or array to the text as YAML lines, indented by `indent` columns.
fn append_mapping_or_list(value: &Value, indent: usize, text: &mut String) {
    let pad = " ".repeat(indent);
    match value {
        Value::Object(entries) => {
            for (key, value) in entries {
                _ = write!(text, "{pad}{}:", quote_yaml(key));
                write_value(value, indent + 2, text);
            }
        }
        Value::Array(items) => {
            for item in items {
                let mut block = String::new();
                let is_nested = match item {
                    Value::Object(entries) => !entries.is_empty(),
                    Value::Array(items) => !items.is_empty(),
                    _ => false,
                };
                if is_nested {
                    // The first line of the item follows the dash.
                    append_mapping_or_list(item, indent + 2, &mut block);
                    _ = write!(text, "{pad}- {}", &block[indent + 2..]);
                } else {
                    write_value(item, indent + 2, &mut block);
                    _ = write!(text, "{pad}-{block}");
                }
            }
        }
        scalar => _ = writeln!(text, "{pad}{}", format_scalar(scalar)),
    }
}

/// Appends the YAML text of a mapping value, after the key and the colon that the caller has
/// already written.
fn write_value(value: &Value, indent: usize, text: &mut String) {
    match value {
        Value::Object(entries) if entries.is_empty() => text.push_str(" {}\n"),
        Value::Array(items) if items.is_empty() => text.push_str(" []\n"),
        Value::Object(_) | Value::Array(_) => {
            text.push('\n');
            append_mapping_or_list(value, indent, text);
        }
        Value::String(lines) if can_be_literal_block(lines) => {
            text.push_str(" |\n");
            for line in lines.lines() {
                match line.is_empty() {
                    true => text.push('\n'),
                    false => _ = writeln!(text, "{}{line}", " ".repeat(indent)),
                }
            }
        }
        scalar => _ = writeln!(text, " {}", format_scalar(scalar)),
    }
}

/// Returns whether a text can be written as a literal block of YAML (`|`), because it consists of
/// complete lines of printable text.
fn can_be_literal_block(text: &str) -> bool {
    text.ends_with('\n')
        && !text.ends_with("\n\n")
        && !text.starts_with([' ', '\n'])
        && text
            .chars()
            .all(|c| c == '\n' || !c.is_control() && !matches!(c, '\u{2028}' | '\u{2029}' | '\u{feff}'))
}

/// Formats a string, number, boolean or null as YAML.
fn format_scalar(value: &Value) -> String {
    match value {
        Value::String(text) => quote_yaml(text),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn values_are_formatted_as_blocks() {
        let value = json!({
            "a": {"text": "x: y", "lines": "one\n\n  two\n", "empty": {}, "none": []},
            "list": [{"name": "b", "values": [1, true]}, "c", ["d"]],
            "number": 400,
            "quoted": "0400",
        });
        let expected = r#"---
a:
  empty: {}
  lines: |
    one

      two
  none: []
  text: "x: y"
list:
  - name: b
    values:
      - 1
      - true
  - c
  - - d
number: 400
quoted: "0400"
"#;
        assert_eq!(format_yaml_documents(&[value]), expected);
    }
}
