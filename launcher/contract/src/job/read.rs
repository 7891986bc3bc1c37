//! Readers: a node → a value of one type, or the fault in words ("must be …, found …").
use super::{
    scalar,
    tree::{Fault, Node, Value, shown},
};
use std::ops::RangeInclusive;

/// What a reader gives.
pub(crate) type Read<T> = Result<T, Fault>;

/// "must be …, found …" at the node.
pub(crate) fn expected(what: &str, node: &Node) -> Fault {
    let message = match node.value {
        Value::Null => format!("has no value; it must be {what}"),
        _ => format!("must be {what}, found {}", node.found()),
    };
    let fault = Fault::at(node.span, message);
    match node.value {
        Value::Null => fault.hint("write a value, or leave the key out for its default"),
        _ => fault,
    }
}

/// An integer in a range.
pub(crate) fn int(range: RangeInclusive<u64>) -> impl Fn(&Node) -> Read<u64> {
    move |node| {
        let fault = || {
            let fault = expected(&describe(&range), node);
            match plain_number(node) {
                Some(n) => fault.hint(format!("write `{n}`")),
                None => fault,
            }
        };
        match node.value {
            Value::Int(n) => u64::try_from(n).ok().filter(|n| range.contains(n)).ok_or_else(fault),
            _ => Err(fault()),
        }
    }
}

/// An integer in a range of u32.
pub(crate) fn int32(range: RangeInclusive<u32>) -> impl Fn(&Node) -> Read<u32> {
    let read = int(u64::from(*range.start())..=u64::from(*range.end()));
    move |node| read(node).map(|n| n as u32)
}

fn describe(range: &RangeInclusive<u64>) -> String {
    match (*range.start(), *range.end()) {
        (low, u64::MAX) => format!("an integer of {low} or more"),
        (low, high) => format!("an integer from {low} to {high}"),
    }
}

/// The integer that someone who wrote `1e3`, `1_000`, `"8"` or `4.0` means.
fn plain_number(node: &Node) -> Option<u64> {
    match node.value {
        Value::Float(x) if x.fract() == 0.0 && (0.0..1e15).contains(&x) => Some(x as u64),
        Value::Text => node.raw.replace(['_', ',', ' '], "").parse().ok(),
        _ => None,
    }
}

/// A number for which `fits` holds; `what` says which.
pub(crate) fn number(what: &'static str, fits: fn(f64) -> bool) -> impl Fn(&Node) -> Read<f64> {
    move |node| {
        let x = match node.value {
            Value::Int(n) => n as f64,
            Value::Float(x) => x,
            _ => return Err(expected(what, node)),
        };
        if x.is_finite() && fits(x) { Ok(x) } else { Err(expected(what, node)) }
    }
}

/// `true` or `false`.
pub(crate) fn boolean(node: &Node) -> Read<bool> {
    match node.value {
        Value::Bool(b) => Ok(b),
        _ => {
            let fault = expected("`true` or `false`", node);
            Err(match node.raw.to_ascii_lowercase().as_str() {
                "yes" | "on" | "y" | "1" | "true" => fault.hint("write `true`"),
                "no" | "off" | "n" | "0" | "false" => fault.hint("write `false`"),
                _ => fault,
            })
        }
    }
}

/// Text that isn't empty and has no control characters (line breaks and tabs included).
pub(crate) fn text(node: &Node) -> Read<String> {
    match node.value {
        Value::Text if node.raw.is_empty() => Err(expected("text", node)),
        Value::Text => printable(node),
        Value::Bool(_) | Value::Int(_) | Value::Float(_) => {
            Err(expected("text", node).hint(format!("put it in quotes: \"{}\"", shown(&node.raw))))
        }
        _ => Err(expected("text", node)),
    }
}

/// A scalar as it was written: arguments and environment values may look like numbers. Line breaks are allowed, NUL isn't.
pub(crate) fn word(node: &Node) -> Read<String> {
    match node.value {
        Value::List(_) | Value::Map(_) => Err(expected("text", node)),
        Value::Null => Err(expected("text", node).hint("write \"\" for an empty text")),
        _ if node.raw.contains('\0') => Err(Fault::at(node.span, "can't contain a NUL character")),
        _ => Ok(node.raw.clone()),
    }
}

fn printable(node: &Node) -> Read<String> {
    match node.raw.chars().find(|c| c.is_control()) {
        Some(c) => {
            Err(Fault::at(node.span, format!("can't contain the control character {}", c.escape_default())))
        }
        None => Ok(node.raw.clone()),
    }
}

/// A list, each item by `item`; the faults of all items.
pub(crate) fn list<T>(what: &'static str, item: impl Fn(&Node) -> Read<T>) -> impl Fn(&Node) -> Read<Vec<T>> {
    move |node| match &node.value {
        Value::List(items) => {
            let mut faults = Vec::new();
            let read = |(i, n)| item(n).map_err(|f| faults.push(f.of(&format!("item {}", i + 1)))).ok();
            let values = items.iter().enumerate().filter_map(read).collect();
            Fault::all(faults).map_or(Ok(values), Err)
        }
        Value::Text => {
            Err(expected(what, node).hint(format!("a list of one is written [\"{}\"]", shown(&node.raw))))
        }
        Value::Int(_) | Value::Float(_) => {
            Err(expected(what, node).hint(format!("a list of one is written [{}]", shown(&node.raw))))
        }
        _ => Err(expected(what, node)),
    }
}

/// One of some names. `later` names are known but not supported by this version.
pub(crate) fn choice<T: Clone>(
    names: &'static [(&'static str, T)],
    later: &'static [&'static str],
) -> impl Fn(&Node) -> Read<T> {
    move |node| {
        if let Value::Text = node.value {
            if let Some((_, value)) = names.iter().find(|(name, _)| *name == node.raw) {
                return Ok(value.clone());
            }
            if later.contains(&node.raw.as_str()) {
                return Err(unsupported(node, &one_of(names)));
            }
        }
        let fault = expected(&one_of(names), node);
        let near = nearest(&node.raw, names.iter().map(|(name, _)| *name));
        Err(match near {
            Some(name) => fault.hint(format!("did you mean `{name}`?")),
            None => fault,
        })
    }
}

/// "can't be … in this version"; `only` is what it can be.
pub(crate) fn unsupported(node: &Node, only: &str) -> Fault {
    let what = match node.value {
        Value::List(_) | Value::Map(_) => node.found(),
        _ => format!("`{}`", shown(&node.raw)),
    };
    Fault::at(node.span, format!("can't be {what} in this version")).hint(format!("use {only}"))
}

fn one_of<T>(names: &[(&str, T)]) -> String {
    let quoted: Vec<String> = names.iter().map(|(n, _)| format!("`{n}`")).collect();
    match quoted.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
        _ => quoted.concat(),
    }
}

/// This word, or what `read` reads.
pub(crate) fn word_or<T: Clone>(
    word: &'static str,
    value: T,
    read: impl Fn(&Node) -> Read<T>,
) -> impl Fn(&Node) -> Read<T> {
    move |node| {
        if matches!(node.value, Value::Text) && node.raw == word {
            return Ok(value.clone());
        }
        read(node).map_err(|fault| Fault {
            message: fault.message.replacen("must be ", &format!("must be `{word}` or "), 1),
            ..fault
        })
    }
}

/// A duration, in milliseconds.
pub(crate) fn duration(node: &Node) -> Read<u64> {
    let fault = || expected("a duration such as `500ms`, `10s`, `5m`, `2h`", node);
    match node.value {
        Value::Text => scalar::duration(&node.raw).ok_or_else(fault),
        Value::Int(_) | Value::Float(_) => {
            Err(fault().hint(format!("write the unit: `{}s`", shown(&node.raw))))
        }
        _ => Err(fault()),
    }
}

/// A size, in bytes.
pub(crate) fn size(node: &Node) -> Read<u64> {
    let fault = || expected("a size such as `512KiB`, `100MB`, `1GiB`", node);
    match node.value {
        Value::Text => scalar::size(&node.raw).ok_or_else(fault),
        Value::Int(_) | Value::Float(_) => {
            Err(fault().hint(format!("write the unit: `{}B`", shown(&node.raw))))
        }
        _ => Err(fault()),
    }
}

/// The nearest of some names, when it is near enough to be what was meant.
pub(crate) fn nearest<'n>(word: &str, names: impl Iterator<Item = &'n str>) -> Option<&'n str> {
    if word.len() > 80 {
        return None;
    }
    let word = word.to_lowercase();
    names
        .map(|name| (strsim::damerau_levenshtein(&word, &name.to_lowercase()), name))
        .min()
        .filter(|(distance, name)| *distance <= name.len().max(word.len()) / 3)
        .map(|(_, name)| name)
}
