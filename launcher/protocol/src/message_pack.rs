//! Decodes MessagePack. Processes of launch exchange values that `rmp_serde` has encoded.
//!
//! `rmp_serde` is not used for decoding, because the compiler would make a copy of its decoder,
//! with several kilobytes of machine code, for each decoded type. The copies took 1.3 MB of the
//! executable. Here, the function [`Decoder::read_item`] does most of the work for all types.
use rmp::Marker;
use serde::de::{
    self, Deserialize, DeserializeSeed, EnumAccess, MapAccess, SeqAccess, VariantAccess, Visitor,
};
use std::fmt;

/// The largest number of arrays and maps that contain one another.
const MAX_DEPTH: u16 = 128;

/// An error for bytes that are not the MessagePack encoding of a value of the expected type.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The bytes end in the middle of a value.
    #[error("the value is incomplete")]
    Truncated,
    /// A value begins with a byte that MessagePack reserves, or that begins an extension type.
    #[error("the type 0x{marker:02x} is not supported")]
    UnsupportedType {
        /// The first byte of the value.
        marker: u8,
    },
    /// A string is not UTF-8.
    #[error("a string is not UTF-8")]
    InvalidUtf8,
    /// Arrays and maps are nested more deeply than the limit.
    #[error("more than {MAX_DEPTH} arrays and maps contain one another")]
    TooDeep,
    /// An array or a map has more elements than the type.
    #[error("an array or map has {count} elements too many")]
    TooManyElements {
        /// The number of elements that the type does not have.
        count: usize,
    },
    /// The value does not have the expected type.
    #[error("{0}")]
    WrongType(String),
}

impl de::Error for DecodeError {
    fn custom<T: fmt::Display>(message: T) -> Self {
        DecodeError::WrongType(message.to_string())
    }
}

/// Decodes the value at the start of `bytes`, and returns it with the bytes that follow it.
///
/// # Errors
/// Fails if the bytes do not begin with the encoding of a `T`.
pub fn decode_prefix<'de, T: Deserialize<'de>>(bytes: &'de [u8]) -> Result<(T, &'de [u8]), DecodeError> {
    let mut decoder = Decoder { rest: bytes, depth: 0 };
    let value = T::deserialize(&mut decoder)?;
    Ok((value, decoder.rest))
}

/// Decodes the value at the start of `bytes`, and ignores the bytes that follow it.
///
/// # Errors
/// Fails if the bytes do not begin with the encoding of a `T`.
pub fn from_slice<'de, T: Deserialize<'de>>(bytes: &'de [u8]) -> Result<T, DecodeError> {
    decode_prefix(bytes).map(|(value, _)| value)
}

/// The position in the bytes that are decoded.
struct Decoder<'de> {
    /// The bytes that are not decoded yet.
    rest: &'de [u8],
    /// The number of arrays and maps around this position.
    depth: u16,
}

/// A scalar, or the start of an array or map.
enum Item<'de> {
    Nil,
    Bool(bool),
    Unsigned(u64),
    Signed(i64),
    F32(f32),
    F64(f64),
    Str(&'de str),
    Bytes(&'de [u8]),
    /// An array with this number of elements, which follow.
    Array(usize),
    /// A map with this number of entries, which follow.
    Map(usize),
}

impl<'de> Decoder<'de> {
    /// Returns the next `count` bytes, and moves behind them.
    fn take_bytes(&mut self, count: usize) -> Result<&'de [u8], DecodeError> {
        let (taken, rest) = self.rest.split_at_checked(count).ok_or(DecodeError::Truncated)?;
        self.rest = rest;
        Ok(taken)
    }

    /// Returns the next `N` bytes as an array, and moves behind them.
    fn take_array<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        let (taken, rest) = self.rest.split_first_chunk().ok_or(DecodeError::Truncated)?;
        self.rest = rest;
        Ok(*taken)
    }

    /// Reads a big-endian length of `N` bytes.
    fn read_length<const N: usize>(&mut self) -> Result<usize, DecodeError> {
        let bytes = self.take_array::<N>()?;
        Ok(bytes.iter().fold(0, |length, byte| (length << 8) | usize::from(*byte)))
    }

    /// Returns the next `count` bytes as a string.
    fn take_str(&mut self, count: usize) -> Result<Item<'de>, DecodeError> {
        let text = str::from_utf8(self.take_bytes(count)?).map_err(|_| DecodeError::InvalidUtf8)?;
        Ok(Item::Str(text))
    }

    /// Returns the type of the next value without moving.
    fn peek_marker(&self) -> Result<Marker, DecodeError> {
        self.rest.first().map(|byte| Marker::from_u8(*byte)).ok_or(DecodeError::Truncated)
    }

    /// Reads the next scalar, or the start of the next array or map.
    fn read_item(&mut self) -> Result<Item<'de>, DecodeError> {
        let [byte] = self.take_array()?;
        Ok(match Marker::from_u8(byte) {
            Marker::Null => Item::Nil,
            Marker::False => Item::Bool(false),
            Marker::True => Item::Bool(true),
            Marker::FixPos(value) => Item::Unsigned(value.into()),
            Marker::U8 => Item::Unsigned(u8::from_be_bytes(self.take_array()?).into()),
            Marker::U16 => Item::Unsigned(u16::from_be_bytes(self.take_array()?).into()),
            Marker::U32 => Item::Unsigned(u32::from_be_bytes(self.take_array()?).into()),
            Marker::U64 => Item::Unsigned(u64::from_be_bytes(self.take_array()?)),
            Marker::FixNeg(value) => Item::Signed(value.into()),
            Marker::I8 => Item::Signed(i8::from_be_bytes(self.take_array()?).into()),
            Marker::I16 => Item::Signed(i16::from_be_bytes(self.take_array()?).into()),
            Marker::I32 => Item::Signed(i32::from_be_bytes(self.take_array()?).into()),
            Marker::I64 => Item::Signed(i64::from_be_bytes(self.take_array()?)),
            Marker::F32 => Item::F32(f32::from_be_bytes(self.take_array()?)),
            Marker::F64 => Item::F64(f64::from_be_bytes(self.take_array()?)),
            Marker::FixStr(length) => self.take_str(length.into())?,
            Marker::Str8 => self.read_length::<1>().and_then(|length| self.take_str(length))?,
            Marker::Str16 => self.read_length::<2>().and_then(|length| self.take_str(length))?,
            Marker::Str32 => self.read_length::<4>().and_then(|length| self.take_str(length))?,
            Marker::Bin8 => Item::Bytes(self.read_length::<1>().and_then(|n| self.take_bytes(n))?),
            Marker::Bin16 => Item::Bytes(self.read_length::<2>().and_then(|n| self.take_bytes(n))?),
            Marker::Bin32 => Item::Bytes(self.read_length::<4>().and_then(|n| self.take_bytes(n))?),
            Marker::FixArray(length) => Item::Array(length.into()),
            Marker::Array16 => Item::Array(self.read_length::<2>()?),
            Marker::Array32 => Item::Array(self.read_length::<4>()?),
            Marker::FixMap(length) => Item::Map(length.into()),
            Marker::Map16 => Item::Map(self.read_length::<2>()?),
            Marker::Map32 => Item::Map(self.read_length::<4>()?),
            Marker::FixExt1
            | Marker::FixExt2
            | Marker::FixExt4
            | Marker::FixExt8
            | Marker::FixExt16
            | Marker::Ext8
            | Marker::Ext16
            | Marker::Ext32
            | Marker::Reserved => return Err(DecodeError::UnsupportedType { marker: byte }),
        })
    }

    /// Enters an array or a map with `count` elements or entries.
    fn enter(&mut self, count: usize) -> Result<Elements<'_, 'de>, DecodeError> {
        if self.depth == MAX_DEPTH {
            return Err(DecodeError::TooDeep);
        }
        self.depth += 1;
        Ok(Elements { decoder: self, count })
    }
}

/// The elements of an array, or the entries of a map, that are not decoded yet.
struct Elements<'a, 'de> {
    decoder: &'a mut Decoder<'de>,
    count: usize,
}

impl Elements<'_, '_> {
    /// Counts the next element. Returns `false` if there is none.
    fn advance(&mut self) -> bool {
        let has_next = self.count > 0;
        self.count -= usize::from(has_next);
        has_next
    }

    /// Returns the number of elements that may follow. Each of them has at least one byte, so that
    /// a wrong length allocates no more memory than the message has bytes.
    fn bound_count(&self) -> usize {
        self.count.min(self.decoder.rest.len())
    }

    /// Leaves the array or map. Fails if elements are left.
    fn leave(self) -> Result<(), DecodeError> {
        self.decoder.depth -= 1;
        if self.count == 0 { Ok(()) } else { Err(DecodeError::TooManyElements { count: self.count }) }
    }
}

impl<'de> SeqAccess<'de> for &mut Elements<'_, 'de> {
    type Error = DecodeError;

    fn next_element_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, DecodeError> {
        if !self.advance() {
            return Ok(None);
        }
        seed.deserialize(&mut *self.decoder).map(Some)
    }

    fn size_hint(&self) -> Option<usize> {
        Some(self.bound_count())
    }
}

impl<'de> MapAccess<'de> for &mut Elements<'_, 'de> {
    type Error = DecodeError;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, DecodeError> {
        if !self.advance() {
            return Ok(None);
        }
        seed.deserialize(&mut *self.decoder).map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, DecodeError> {
        seed.deserialize(&mut *self.decoder)
    }

    fn size_hint(&self) -> Option<usize> {
        Some(self.bound_count())
    }
}

impl<'de> de::Deserializer<'de> for &mut Decoder<'de> {
    type Error = DecodeError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        match self.read_item()? {
            Item::Nil => visitor.visit_unit(),
            Item::Bool(value) => visitor.visit_bool(value),
            Item::Unsigned(value) => visitor.visit_u64(value),
            Item::Signed(value) => visitor.visit_i64(value),
            Item::F32(value) => visitor.visit_f32(value),
            Item::F64(value) => visitor.visit_f64(value),
            Item::Str(text) => visitor.visit_borrowed_str(text),
            Item::Bytes(bytes) => visitor.visit_borrowed_bytes(bytes),
            Item::Array(count) => {
                let mut elements = self.enter(count)?;
                let value = visitor.visit_seq(&mut elements)?;
                elements.leave().map(|()| value)
            }
            Item::Map(count) => {
                let mut elements = self.enter(count)?;
                let value = visitor.visit_map(&mut elements)?;
                elements.leave().map(|()| value)
            }
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        if self.peek_marker()? == Marker::Null {
            self.read_item()?;
            return visitor.visit_none();
        }
        visitor.visit_some(self)
    }

    /// A variant without content is its name. Another one is a map with one entry, from the name to
    /// the content.
    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        _variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, DecodeError> {
        if self.peek_marker()? != Marker::FixMap(1) {
            return visitor.visit_enum(VariantName { decoder: self, has_content: false });
        }
        self.read_item()?;
        self.enter(0)?;
        let value = visitor.visit_enum(VariantName { decoder: &mut *self, has_content: true })?;
        self.depth -= 1;
        Ok(value)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, DecodeError> {
        visitor.visit_newtype_struct(self)
    }

    /// `rmp_serde` encodes a struct without fields as an empty array.
    fn deserialize_unit_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, DecodeError> {
        if self.peek_marker()? == Marker::FixArray(0) {
            self.read_item()?;
            return visitor.visit_unit();
        }
        self.deserialize_any(visitor)
    }

    fn is_human_readable(&self) -> bool {
        false
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str string bytes byte_buf unit seq tuple
        tuple_struct map struct identifier ignored_any
    }
}

/// The name of a variant of an enum, and the content that may follow it.
struct VariantName<'a, 'de> {
    decoder: &'a mut Decoder<'de>,
    has_content: bool,
}

impl<'de> EnumAccess<'de> for VariantName<'_, 'de> {
    type Error = DecodeError;
    type Variant = Self;

    fn variant_seed<V: DeserializeSeed<'de>>(self, seed: V) -> Result<(V::Value, Self), DecodeError> {
        let variant = seed.deserialize(&mut *self.decoder)?;
        Ok((variant, self))
    }
}

impl VariantName<'_, '_> {
    /// Fails if the variant has no content.
    fn require_content(&self) -> Result<(), DecodeError> {
        if self.has_content {
            return Ok(());
        }
        Err(de::Error::invalid_type(de::Unexpected::UnitVariant, &"a variant with content"))
    }
}

impl<'de> VariantAccess<'de> for VariantName<'_, 'de> {
    type Error = DecodeError;

    fn unit_variant(self) -> Result<(), DecodeError> {
        if self.has_content { Deserialize::deserialize(self.decoder) } else { Ok(()) }
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<T::Value, DecodeError> {
        self.require_content()?;
        seed.deserialize(self.decoder)
    }

    fn tuple_variant<V: Visitor<'de>>(self, _len: usize, visitor: V) -> Result<V::Value, DecodeError> {
        self.require_content()?;
        de::Deserializer::deserialize_any(self.decoder, visitor)
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        _fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, DecodeError> {
        self.require_content()?;
        de::Deserializer::deserialize_any(self.decoder, visitor)
    }
}

#[cfg(test)]
mod tests;
