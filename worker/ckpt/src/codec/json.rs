//! Reads the JSON files of checkpoints, with limits on the number of values, because the text is
//! untrusted.
use super::disk::Directory;
use crate::error::{CkptError, Result};
use serde::de::{self, DeserializeOwned, DeserializeSeed, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Number, Value};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

/// Reads the JSON file `name` in `directory`. Fails if the file is missing, has more than
/// `bytes_max` bytes, or is not an object of the type `T`.
pub(crate) fn read_json<T: DeserializeOwned>(directory: &Directory, name: &str, bytes_max: u64) -> Result<T> {
    let text = directory.read_file(name, bytes_max)?;
    parse_object(&text).map_err(|e| CkptError::damaged(directory.path(), name, e))
}

/// Reads the JSON file `name` in `directory`, or returns `None` if the file does not exist.
pub(crate) fn read_json_if_exists<T: DeserializeOwned>(
    directory: &Directory,
    name: &str,
    bytes_max: u64,
) -> Result<Option<T>> {
    match directory.file_size(name)? {
        Some(_) => read_json(directory, name, bytes_max).map(Some),
        None => Ok(None),
    }
}

/// Deserializes a struct of type `T` from the text of a JSON object. Rejects arrays, which serde
/// accepts in place of a struct.
pub(crate) fn parse_object<T: DeserializeOwned>(text: &[u8]) -> serde_json::Result<T> {
    match text.iter().find(|byte| !byte.is_ascii_whitespace()) {
        None | Some(b'{') => serde_json::from_slice(text),
        Some(_) => Err(de::Error::custom("not an object")),
    }
}

/// A JSON value whose deserialization fails if it contains more than `N` values, counting all
/// nested ones.
pub(crate) struct LimitedValue<const N: usize>(pub(crate) Value);

impl<'de, const N: usize> Deserialize<'de> for LimitedValue<N> {
    fn deserialize<D: Deserializer<'de>>(d: D) -> std::result::Result<Self, D::Error> {
        ValueSeed { left: &Cell::new(N), limit: N }.deserialize(d).map(LimitedValue)
    }
}

/// Deserializes a JSON value that contains at most `N` values. For the attribute `deserialize_with`
/// of a field.
pub(crate) fn deserialize_value<'de, D: Deserializer<'de>, const N: usize>(
    d: D,
) -> std::result::Result<Value, D::Error> {
    LimitedValue::<N>::deserialize(d).map(|value| value.0)
}

/// Deserializes an optional JSON value that contains at most `N` values.
pub(crate) fn deserialize_optional_value<'de, D: Deserializer<'de>, const N: usize>(
    d: D,
) -> std::result::Result<Option<Value>, D::Error> {
    deserialize_value::<D, N>(d).map(|value| Some(value).filter(|v| !v.is_null()))
}

/// Deserializes a list of at most `N` items. Used in the attribute `deserialize_with` of fields.
pub(crate) fn deserialize_list<'de, D: Deserializer<'de>, T: Deserialize<'de>, const N: usize>(
    d: D,
) -> std::result::Result<Vec<T>, D::Error> {
    d.deserialize_seq(ListVisitor::<T, N>(PhantomData))
}

/// Deserializes an optional list of at most `N` items.
pub(crate) fn deserialize_optional_list<'de, D: Deserializer<'de>, T: Deserialize<'de>, const N: usize>(
    d: D,
) -> std::result::Result<Option<Vec<T>>, D::Error> {
    /// A serde visitor that deserializes a list of at most `N` items, or null as `None`.
    struct OptionVisitor<T, const N: usize>(PhantomData<T>);
    impl<'de, T: Deserialize<'de>, const N: usize> Visitor<'de> for OptionVisitor<T, N> {
        type Value = Option<Vec<T>>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "null or a list of at most {N} items")
        }

        fn visit_none<E: de::Error>(self) -> std::result::Result<Self::Value, E> {
            Ok(None)
        }

        fn visit_unit<E: de::Error>(self) -> std::result::Result<Self::Value, E> {
            Ok(None)
        }

        fn visit_some<D: Deserializer<'de>>(self, d: D) -> std::result::Result<Self::Value, D::Error> {
            deserialize_list::<D, T, N>(d).map(Some)
        }
    }
    d.deserialize_option(OptionVisitor::<T, N>(PhantomData))
}

/// Deserializes an object with at most `N` entries of the type `T`. Used in the attribute
/// `deserialize_with` of fields.
pub(crate) fn deserialize_map<'de, D: Deserializer<'de>, T: Deserialize<'de>, const N: usize>(
    d: D,
) -> std::result::Result<BTreeMap<String, T>, D::Error> {
    d.deserialize_map(MapVisitor::<T, N>(PhantomData))
}

/// A serde visitor that deserializes a list, and fails if it has more than `N` items.
struct ListVisitor<T, const N: usize>(PhantomData<T>);

impl<'de, T: Deserialize<'de>, const N: usize> Visitor<'de> for ListVisitor<T, N> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at most {N} items")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> std::result::Result<Vec<T>, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = list.next_element()? {
            if items.len() == N {
                return Err(de::Error::custom(format_args!("more than {N} items")));
            }
            items.push(item);
        }
        Ok(items)
    }
}

/// A serde visitor that deserializes a JSON object to a map, and fails if the object has more than
/// `N` entries. Of equal keys, the last one wins.
struct MapVisitor<T, const N: usize>(PhantomData<T>);

impl<'de, T: Deserialize<'de>, const N: usize> Visitor<'de> for MapVisitor<T, N> {
    type Value = BTreeMap<String, T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an object of at most {N} entries")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Self::Value, A::Error> {
        let mut entries = BTreeMap::new();
        while let Some((key, value)) = map.next_entry()? {
            entries.insert(key, value);
            if entries.len() > N {
                return Err(de::Error::custom(format_args!("more than {N} entries")));
            }
        }
        Ok(entries)
    }
}

/// A serde seed that deserializes one JSON value, and fails as soon as more nested values than the
/// limit were read.
#[derive(Clone, Copy)]
struct ValueSeed<'a> {
    /// Number of values that may still be deserialized.
    left: &'a Cell<usize>,
    /// The limit on the number of values, for the error.
    limit: usize,
}

impl<'de> DeserializeSeed<'de> for ValueSeed<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> std::result::Result<Value, D::Error> {
        match self.left.get().checked_sub(1) {
            Some(left) => self.left.set(left),
            None => return Err(de::Error::custom(format_args!("more than {} values", self.limit))),
        }
        d.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for ValueSeed<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> std::result::Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_none<E>(self) -> std::result::Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_some<D: Deserializer<'de>>(self, d: D) -> std::result::Result<Value, D::Error> {
        d.deserialize_any(self)
    }

    fn visit_bool<E>(self, value: bool) -> std::result::Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> std::result::Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> std::result::Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> std::result::Result<Value, E> {
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E>(self, value: &str) -> std::result::Result<Value, E> {
        Ok(value.into())
    }

    fn visit_string<E>(self, value: String) -> std::result::Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> std::result::Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = list.next_element_seed(self)? {
            items.push(item);
        }
        Ok(Value::Array(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Value, A::Error> {
        let mut entries = Map::new();
        while let Some(key) = map.next_key::<String>()? {
            entries.insert(key, map.next_value_seed(self)?);
        }
        Ok(Value::Object(entries))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A struct for tests that has a field of every kind of limited value.
    #[derive(Debug, PartialEq, Deserialize)]
    struct Limited {
        #[serde(default, deserialize_with = "deserialize_list::<_, _, 2>")]
        list: Vec<u64>,
        #[serde(default, deserialize_with = "deserialize_optional_list::<_, _, 2>")]
        optional: Option<Vec<u64>>,
        #[serde(default, deserialize_with = "deserialize_map::<_, _, 2>")]
        map: BTreeMap<String, u64>,
        #[serde(default, deserialize_with = "deserialize_value::<_, 4>")]
        value: Value,
        #[serde(default, deserialize_with = "deserialize_optional_value::<_, 4>")]
        maybe: Option<Value>,
    }

    #[test]
    fn limits_accept_the_largest_value_and_reject_the_next() {
        for (accepted, rejected, error) in [
            (r#"{"list":[1,2]}"#, r#"{"list":[1,2,3]}"#, "more than 2 items"),
            (r#"{"optional":[1,2]}"#, r#"{"optional":[1,2,3]}"#, "more than 2 items"),
            (r#"{"map":{"a":1,"b":2}}"#, r#"{"map":{"a":1,"b":2,"c":3}}"#, "more than 2 entries"),
            (r#"{"value":[1,{"a":2}]}"#, r#"{"value":[1,{"a":2},3]}"#, "more than 4 values"),
            (r#"{"maybe":[1,2,3]}"#, r#"{"maybe":[1,2,3,4]}"#, "more than 4 values"),
            (r#"{"optional":null,"maybe":null}"#, "[[1],[2]]", "not an object"),
            ("{}", "", "EOF while parsing"),
        ] {
            assert!(parse_object::<Limited>(accepted.as_bytes()).is_ok(), "{accepted}");
            let text = parse_object::<Limited>(rejected.as_bytes()).expect_err(rejected).to_string();
            assert!(text.contains(error), "{rejected}: {text}");
        }
        let deep = format!("{{\"value\":{}", "[".repeat(100_000));
        assert!(parse_object::<Limited>(deep.as_bytes()).is_err());
    }

    proptest! {
        #[test]
        fn a_limited_value_equals_the_value_of_serde_json(text in "[\\[\\]{}:,\"a0-9.eE \\-ntrufls]{0,40}") {
            let limited = serde_json::from_str::<LimitedValue<1000>>(&text).map(|v| v.0).ok();
            prop_assert_eq!(limited, serde_json::from_str::<Value>(&text).ok());
        }
    }
}
