//! Tests of the MessagePack decoder with values that `rmp_serde` encodes, and with damaged bytes.
use super::{DecodeError, MAX_DEPTH, decode_prefix, from_slice};
use proptest::prelude::*;
use serde::{Deserialize, Serialize, de::IgnoredAny};
use std::{collections::BTreeMap, net::IpAddr};

/// A value with each kind of content that serde knows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
enum Value {
    Unit,
    UnitStruct(Marker),
    Newtype(Box<Value>),
    Integers(u8, u16, u32, u64, i8, i16, i32, i64),
    Floats { single: f32, double: f64 },
    Text(String, char),
    Bytes(#[serde(with = "bytes")] Vec<u8>),
    Optional(Option<bool>),
    List(Vec<Value>),
    Named(BTreeMap<String, Value>),
    Address(IpAddr),
    Tagged(Tagged),
}

/// A struct without fields.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Marker;

/// An enum that serde decodes with a buffer, because the tag may follow the content.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind")]
enum Tagged {
    Empty,
    Full { count: i32, rest: Option<Vec<u64>> },
}

/// Encodes a vector as the MessagePack type for bytes.
mod bytes {
    use serde::{Deserializer, Serializer, de::Visitor};

    pub(super) fn serialize<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(bytes)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
        struct BytesVisitor;
        impl Visitor<'_> for BytesVisitor {
            type Value = Vec<u8>;

            fn expecting(&self, formatter: &mut std::fmt::Formatter) -> std::fmt::Result {
                formatter.write_str("bytes")
            }

            fn visit_bytes<E>(self, bytes: &[u8]) -> Result<Vec<u8>, E> {
                Ok(bytes.to_vec())
            }
        }
        deserializer.deserialize_bytes(BytesVisitor)
    }
}

/// Generates a value that contains at most a few dozen others.
fn any_value() -> impl Strategy<Value = Value> {
    let scalar = prop_oneof![
        Just(Value::Unit),
        Just(Value::UnitStruct(Marker)),
        any::<(u8, u16, u32, u64, i8, i16, i32, i64)>()
            .prop_map(|(a, b, c, d, e, f, g, h)| Value::Integers(a, b, c, d, e, f, g, h)),
        (proptest::num::f32::NORMAL | proptest::num::f32::ZERO, proptest::num::f64::NORMAL)
            .prop_map(|(single, double)| Value::Floats { single, double }),
        (".{0,300}", any::<char>()).prop_map(|(text, character)| Value::Text(text, character)),
        proptest::collection::vec(any::<u8>(), 0..300).prop_map(Value::Bytes),
        any::<Option<bool>>().prop_map(Value::Optional),
        any::<IpAddr>().prop_map(Value::Address),
        Just(Value::Tagged(Tagged::Empty)),
        any::<(i32, Option<Vec<u64>>)>()
            .prop_map(|(count, rest)| Value::Tagged(Tagged::Full { count, rest })),
    ];
    scalar.prop_recursive(4, 40, 20, |inner| {
        prop_oneof![
            inner.clone().prop_map(|value| Value::Newtype(Box::new(value))),
            proptest::collection::vec(inner.clone(), 0..20).prop_map(Value::List),
            proptest::collection::btree_map(".{0,40}", inner, 0..20).prop_map(Value::Named),
        ]
    })
}

proptest! {
    /// What `rmp_serde` encodes, with and without names of fields, is decoded as the same value.
    #[test]
    fn encoded_values_are_decoded(value in any_value(), rest in proptest::collection::vec(any::<u8>(), 0..4)) {
        for mut encoded in [rmp_serde::to_vec_named(&value), rmp_serde::to_vec(&value)].map(Result::unwrap) {
            encoded.extend_from_slice(&rest);
            prop_assert_eq!(decode_prefix::<Value>(&encoded), Ok((value.clone(), &rest[..])));
        }
    }

    /// Damaged bytes are decoded as the value as which `rmp_serde` decodes them, or are an error.
    #[test]
    fn damaged_bytes_never_panic(
        value in any_value(),
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut encoded = rmp_serde::to_vec_named(&value).unwrap();
        for (position, byte) in changes {
            let position = position.index(encoded.len());
            encoded[position] = byte;
        }
        _ = from_slice::<Value>(&encoded[..cut.index(encoded.len())]);
        if let Ok(ours) = from_slice::<Value>(&encoded) {
            let expected = rmp_serde::from_slice::<Value>(&encoded);
            prop_assert_eq!(format!("{:?}", expected.unwrap()), format!("{ours:?}"));
        }
    }

    /// Arbitrary bytes are skipped as one value, or are an error.
    #[test]
    fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        if let Ok((IgnoredAny, rest)) = decode_prefix(&bytes) {
            prop_assert!(rest.len() < bytes.len());
        }
    }
}

/// Each prefix of an encoded value is incomplete.
#[test]
fn every_cut_is_reported() {
    let value = Value::List(vec![Value::Integers(1, 2, 70_000, u64::MAX, -1, -300, -70_000, i64::MIN)]);
    let encoded = rmp_serde::to_vec_named(&value).unwrap();
    for length in 0..encoded.len() {
        assert_eq!(from_slice::<Value>(&encoded[..length]), Err(DecodeError::Truncated), "{length}");
    }
}

/// Deeply nested arrays are an error before the stack is full.
#[test]
fn deep_nesting_is_rejected() {
    let mut nested = vec![0x91; MAX_DEPTH as usize];
    nested.push(0xc0);
    assert!(from_slice::<IgnoredAny>(&nested).is_ok());
    nested.insert(0, 0x91);
    assert_eq!(from_slice::<IgnoredAny>(&nested).err(), Some(DecodeError::TooDeep));
    assert_eq!(from_slice::<IgnoredAny>(&[0x91; 10_000_000]).err(), Some(DecodeError::TooDeep));
}

/// An array that announces four billion elements allocates no memory for them.
#[test]
fn wrong_lengths_are_reported() {
    let array = [0xdd, 0xff, 0xff, 0xff, 0xff, 0x01];
    assert_eq!(from_slice::<Vec<u64>>(&array), Err(DecodeError::Truncated));
    let bytes = [0xc6, 0xff, 0xff, 0xff, 0xff, 0x01];
    assert_eq!(from_slice::<IgnoredAny>(&bytes).err(), Some(DecodeError::Truncated));
    assert_eq!(from_slice::<(u8, u8)>(&[0x93, 1, 2, 3]), Err(DecodeError::TooManyElements { count: 1 }));
}

/// Values of another type, bad strings and extension types are distinct errors.
#[test]
fn wrong_types_are_reported() {
    assert_eq!(from_slice::<String>(&[0xa1, 0xff]), Err(DecodeError::InvalidUtf8));
    assert_eq!(from_slice::<u8>(&[0xc1]), Err(DecodeError::UnsupportedType { marker: 0xc1 }));
    assert_eq!(from_slice::<u8>(&[0xd4, 0, 0]), Err(DecodeError::UnsupportedType { marker: 0xd4 }));
    assert!(matches!(from_slice::<u8>(&[0xa1, b'x']), Err(DecodeError::WrongType(_))));
    assert!(matches!(from_slice::<u8>(&[0xcd, 1, 0]), Err(DecodeError::WrongType(_))));
    let name_without_content = rmp_serde::to_vec("Newtype").unwrap();
    assert!(matches!(from_slice::<Value>(&name_without_content), Err(DecodeError::WrongType(_))));
}
