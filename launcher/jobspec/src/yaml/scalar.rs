//! Parses scalars: values of YAML 1.2's core schema, durations and sizes.
use super::tree::YamlValue;

/// Determines the value of a plain (unquoted) scalar by YAML 1.2's core schema. Integers that do
/// not fit `i128` become floats.
pub(crate) fn resolve_scalar(text: &str) -> YamlValue {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => return YamlValue::Null,
        "true" | "True" | "TRUE" => return YamlValue::Bool(true),
        "false" | "False" | "FALSE" => return YamlValue::Bool(false),
        ".nan" | ".NaN" | ".NAN" => return YamlValue::Float(f64::NAN),
        _ => {}
    }
    if let Some(int) = parse_integer(text) {
        return YamlValue::Int(int);
    }
    match parse_float(text) {
        Some(float) => YamlValue::Float(float),
        None => YamlValue::Text,
    }
}

/// Parses a decimal, octal (`0o17`) or hexadecimal (`0xf`) integer. Returns `None` for other text.
fn parse_integer(text: &str) -> Option<i128> {
    let digits = |s: &str, radix: u32| -> Option<i128> {
        (!s.is_empty() && s.chars().all(|c| c.is_digit(radix)))
            .then(|| i128::from_str_radix(s, radix).ok())?
    };
    if let Some(octal) = text.strip_prefix("0o") {
        return digits(octal, 8);
    }
    if let Some(hex) = text.strip_prefix("0x") {
        return digits(hex, 16);
    }
    match text.strip_prefix('-') {
        Some(rest) => digits(rest, 10).map(|n| -n),
        None => digits(text.strip_prefix('+').unwrap_or(text), 10),
    }
}

/// Parses a decimal floating-point number of YAML's core schema, such as `-1.5e3`, or an infinity
/// (`.inf`). Numbers match `[-+]? ( \. [0-9]+ | [0-9]+ ( \. [0-9]* )? ) ( [eE] [-+]? [0-9]+ )?`.
/// Returns `None` for other text.
fn parse_float(text: &str) -> Option<f64> {
    let unsigned = text.strip_prefix(['-', '+']).unwrap_or(text);
    if matches!(unsigned, ".inf" | ".Inf" | ".INF") {
        return Some(if text.starts_with('-') { f64::NEG_INFINITY } else { f64::INFINITY });
    }
    let (mantissa, exponent) = match unsigned.find(['e', 'E']) {
        Some(at) => (&unsigned[..at], Some(&unsigned[at + 1..])),
        None => (unsigned, None),
    };
    let all_digits = |s: &str| s.bytes().all(|b| b.is_ascii_digit());
    let exponent_fits = exponent.is_none_or(|e| {
        let e = e.strip_prefix(['-', '+']).unwrap_or(e);
        !e.is_empty() && all_digits(e)
    });
    let mantissa_fits = match mantissa.split_once('.') {
        Some((whole, part)) => {
            all_digits(whole) && all_digits(part) && !(whole.is_empty() && part.is_empty())
        }
        None => !mantissa.is_empty() && all_digits(mantissa),
    };
    (exponent_fits && mantissa_fits).then(|| text.parse().ok())?
}

/// Parses a duration such as `500ms`, `10s` or `1.5h` into milliseconds. The units are ms, s, m, h
/// and d. Returns `None` for other text.
pub fn parse_duration(text: &str) -> Option<u64> {
    let (number, unit) = split_number_and_unit(text)?;
    let unit = match unit {
        "ms" => 1.0,
        "s" => 1e3,
        "m" => 60e3,
        "h" => 3_600e3,
        "d" => 86_400e3,
        _ => return None,
    };
    round_to_integer(number * unit)
}

/// Parses a size such as `512B`, `5GB` (powers of 1000) or `1.5GiB` (powers of 1024) into bytes.
/// Returns `None` for other text.
pub fn parse_size(text: &str) -> Option<u64> {
    let (number, unit) = split_number_and_unit(text)?;
    let unit = match unit {
        "B" => 1.0,
        "KB" | "kB" => 1e3,
        "MB" => 1e6,
        "GB" => 1e9,
        "TB" => 1e12,
        "KiB" => 1024.0,
        "MiB" => 1024f64.powi(2),
        "GiB" => 1024f64.powi(3),
        "TiB" => 1024f64.powi(4),
        _ => return None,
    };
    round_to_integer(number * unit)
}

/// Splits a text such as `1.5 GiB` into the number 1.5 and the unit `GiB`. Returns `None` if the
/// number or the unit is missing.
fn split_number_and_unit(text: &str) -> Option<(f64, &str)> {
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.')?;
    let number = text[..split].parse::<f64>().ok()?;
    Some((number, text[split..].trim_start_matches(' ')))
}

/// Rounds a non-negative number to the nearest integer. Returns `None` if `x` is negative, or too
/// large for an exact result.
fn round_to_integer(x: f64) -> Option<u64> {
    (x.is_finite() && (0.0..9e15).contains(&x)).then(|| x.round() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the name of the type that [`resolve_scalar`] gives to a plain scalar.
    fn name_resolved_type(text: &str) -> &'static str {
        match resolve_scalar(text) {
            YamlValue::Null => "null",
            YamlValue::Bool(_) => "bool",
            YamlValue::Int(_) => "int",
            YamlValue::Float(_) => "float",
            _ => "text",
        }
    }

    #[test]
    fn plain_scalars_resolve_by_the_core_schema() {
        for (text, expected) in [
            ("", "null"),
            ("~", "null"),
            ("NULL", "null"),
            ("nULL", "text"),
            ("true", "bool"),
            ("yes", "text"),
            ("on", "text"),
            ("off", "text"),
            ("12", "int"),
            ("+12", "int"),
            ("-0", "int"),
            ("0o17", "int"),
            ("0o18", "text"),
            ("0xfF", "int"),
            ("-0x1", "text"),
            ("1_000", "text"),
            ("12:30:45", "text"),
            ("1.", "float"),
            (".5", "float"),
            (".", "text"),
            ("3e-4", "float"),
            ("3e", "text"),
            ("1e+3", "float"),
            ("-.inf", "float"),
            ("inf", "text"),
            (".nan", "float"),
            ("1.2.3", "text"),
            ("-", "text"),
            ("999999999999999999999999999999999999999999", "float"),
        ] {
            assert_eq!(name_resolved_type(text), expected, "{text:?}");
        }
        assert!(matches!(resolve_scalar("0o17"), YamlValue::Int(15)));
        assert!(matches!(resolve_scalar("-12"), YamlValue::Int(-12)));
    }

    #[test]
    fn durations_are_parsed_with_their_unit() {
        assert_eq!(parse_duration("10s"), Some(10_000));
        assert_eq!(parse_duration("1.5m"), Some(90_000));
        assert_eq!(parse_duration("250ms"), Some(250));
        assert_eq!(parse_duration("2 h"), Some(7_200_000));
        for bad in ["10", "s", "10 parsecs", "-1s", "1e3s", "", "1.2.3s", "999999999999999999d", "٣s"] {
            assert_eq!(parse_duration(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn sizes_are_parsed_with_their_unit() {
        assert_eq!(parse_size("5GB"), Some(5_000_000_000));
        assert_eq!(parse_size("1GiB"), Some(1 << 30));
        assert_eq!(parse_size("1.5KiB"), Some(1536));
        for bad in ["1G", "1", "GiB", "1gib", "-1B", "1e9B", "9999999TiB"] {
            assert_eq!(parse_size(bad), None, "{bad:?}");
        }
    }
}
