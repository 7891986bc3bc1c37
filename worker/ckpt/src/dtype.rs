//! Element types, by their names in safetensors.
use serde::{Deserialize, Serialize};
use std::fmt;

/// Element type of a tensor at rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[allow(non_camel_case_types)]
pub enum Dtype {
    F64,
    F32,
    F16,
    BF16,
    F8_E4M3,
    F8_E5M2,
    I64,
    I32,
    I16,
    I8,
    U64,
    U32,
    U16,
    U8,
    BOOL,
}

impl Dtype {
    /// True for what is read as F32 without loss.
    pub fn is_float(self) -> bool {
        matches!(self, Dtype::F32 | Dtype::BF16 | Dtype::F16)
    }

    /// Bytes per element.
    pub fn size(self) -> u64 {
        use Dtype::*;
        match self {
            F64 | I64 | U64 => 8,
            F32 | I32 | U32 => 4,
            F16 | BF16 | I16 | U16 => 2,
            F8_E4M3 | F8_E5M2 | I8 | U8 | BOOL => 1,
        }
    }

    /// Its name in PyTorch, as `config.json` wants it.
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
