//! [`Dtype`]: the element types of tensors in files, with their names in safetensors and PyTorch.
use serde::{Deserialize, Serialize};
use std::fmt;

/// The type of a tensor's elements in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[allow(non_camel_case_types)]
pub enum Dtype {
    /// 64-bit float.
    F64,
    /// 32-bit float.
    F32,
    /// IEEE 16-bit float.
    F16,
    /// bfloat16.
    BF16,
    /// 8-bit float with 4 exponent bits.
    F8_E4M3,
    /// 8-bit float with 5 exponent bits.
    F8_E5M2,
    /// 64-bit signed integer.
    I64,
    /// 32-bit signed integer.
    I32,
    /// 16-bit signed integer.
    I16,
    /// 8-bit signed integer.
    I8,
    /// 64-bit unsigned integer.
    U64,
    /// 32-bit unsigned integer.
    U32,
    /// 16-bit unsigned integer.
    U16,
    /// 8-bit unsigned integer.
    U8,
    /// Boolean, one byte.
    BOOL,
}

impl Dtype {
    /// All element types that safetensors files may have.
    pub(crate) const ALL: [Dtype; 15] = {
        use Dtype::*;
        [F64, F32, F16, BF16, F8_E4M3, F8_E5M2, I64, I32, I16, I8, U64, U32, U16, U8, BOOL]
    };

    /// Returns true for F32, BF16 and F16: the floating-point dtypes whose values F32 represents
    /// exactly and which are read as F32.
    pub fn is_float(self) -> bool {
        matches!(self, Dtype::F32 | Dtype::BF16 | Dtype::F16)
    }

    /// Returns the size of one element in bytes.
    pub fn size(self) -> u64 {
        use Dtype::*;
        match self {
            F64 | I64 | U64 => 8,
            F32 | I32 | U32 => 4,
            F16 | BF16 | I16 | U16 => 2,
            F8_E4M3 | F8_E5M2 | I8 | U8 | BOOL => 1,
        }
    }

    /// Returns the name of this element type in PyTorch and in `config.json`, such as `bfloat16`.
    pub fn torch_name(self) -> &'static str {
        use Dtype::*;
        match self {
            F64 => "float64",
            F32 => "float32",
            F16 => "float16",
            BF16 => "bfloat16",
            F8_E4M3 => "float8_e4m3fn",
            F8_E5M2 => "float8_e5m2",
            I64 => "int64",
            I32 => "int32",
            I16 => "int16",
            I8 => "int8",
            U64 => "uint64",
            U32 => "uint32",
            U16 => "uint16",
            U8 => "uint8",
            BOOL => "bool",
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}
