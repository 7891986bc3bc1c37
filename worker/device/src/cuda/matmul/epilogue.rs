//! [`Epilogue`]: what the kernel of a matmul computes from its operands or its result before it
//! stores the result.
use super::super::bindings::{Address, cublas_lt_sys::cublasLtEpilogue_t};

/// What cuBLASLt computes in addition to the matmul `c[m, n] = a[m, k] · b[k, n]`. Vectors and
/// `aux` have the type of `c`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in super::super) enum Epilogue {
    /// Nothing.
    None,
    /// Adds the bias, a vector of `n` elements at this GPU address, to each row.
    Bias(Address),
    /// Adds the bias to each row, writes the sum to `aux`, which has the layout of `c`, and applies
    /// GELU to the sum.
    Gelu { bias: Address, aux: Address },
    /// Multiplies the result by the derivative of GELU at `aux`, which has the layout of `c`.
    GeluGradient { aux: Address },
    /// Writes the sums of the rows of `a` to a vector of `m` elements. `a` must be transposed.
    RowSumsOfA(Address),
    /// Writes the sums of the columns of `b` to a vector of `n` elements. `b` must not be
    /// transposed.
    ColumnSumsOfB(Address),
}

impl Epilogue {
    /// Returns cuBLASLt's number of the epilogue. Operands are exchanged in the request, so
    /// cuBLASLt's matrix A is `b`.
    pub(super) fn kind(self) -> cublasLtEpilogue_t {
        match self {
            Epilogue::None => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DEFAULT,
            Epilogue::Bias(_) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS,
            Epilogue::Gelu { .. } => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
            Epilogue::GeluGradient { .. } => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DGELU,
            Epilogue::RowSumsOfA(_) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BGRADB,
            Epilogue::ColumnSumsOfB(_) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BGRADA,
        }
    }

    /// Returns the GPU address of the bias, or of the sums that are the gradient of a bias.
    pub(super) fn vector(self) -> Option<Address> {
        match self {
            Epilogue::None | Epilogue::GeluGradient { .. } => None,
            Epilogue::Bias(at) | Epilogue::RowSumsOfA(at) | Epilogue::ColumnSumsOfB(at) => Some(at),
            Epilogue::Gelu { bias, .. } => Some(bias),
        }
    }

    /// Returns the GPU address of the input of GELU.
    pub(super) fn aux(self) -> Option<Address> {
        match self {
            Epilogue::Gelu { aux, .. } | Epilogue::GeluGradient { aux } => Some(aux),
            _ => None,
        }
    }

    /// Describes the epilogue for profiles, as a suffix of the matmul's types. A bias is not
    /// described.
    pub(super) fn describe(self) -> &'static str {
        match self {
            Epilogue::None | Epilogue::Bias(_) => "",
            Epilogue::Gelu { .. } => ", GELU",
            Epilogue::GeluGradient { .. } => ", GELU gradient",
            Epilogue::RowSumsOfA(_) | Epilogue::ColumnSumsOfB(_) => ", bias gradient",
        }
    }
}
