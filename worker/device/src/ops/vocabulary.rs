//! Ops over the vocabulary: the token embedding, and the classifier (output layer with its loss).
use super::arguments::{WriteMode, expect_lens};
use crate::buffer::{View, ViewMut};

/// Ops for the token embedding: the forward and the backward pass.
pub trait EmbeddingOps {
    /// Looks up token embeddings: `x[m,d] = w[tokens[m], d]`. Every token must be below the number
    /// of rows of `w`.
    fn embedding_forward(&self, x: ViewMut, w: View, tokens: &[u32], d: usize);
    /// Adds the gradient of the embedding's weight: `dw[tokens[m], d] += dx[m,d]`, in the order of
    /// `m`.
    fn embedding_backward(&self, dw: ViewMut, dx: View, tokens: &[u32], d: usize);
}

/// Ops for the classifier, which computes the output layer and the cross-entropy loss together.
pub trait ClassifierOps {
    /// Computes the logits `x[m,d] · w[v,d]ᵀ` and the cross-entropy loss of each row, for a limited
    /// number of rows at a time to save memory.
    ///
    /// `loss[m]` receives the loss of each row, which is 0 where `labels[m]` is [`IGNORE_LABEL`].
    /// If `grads` is given, also computes `dx[m,d] = dlogits · w` and `dw[v,d] (=|+=) dlogitsᵀ ·
    /// x`, where `dlogits` is multiplied by [`ClassifierGrads::scale`].
    fn compute_classifier_loss(
        &self,
        loss: ViewMut,
        x: View,
        w: View,
        labels: &[u32],
        shape: ClassifierShape,
        grads: Option<ClassifierGrads>,
    );
}

/// Numbers of rows, elements per row and vocabulary entries of the output layer, and the optional
/// softcap of the logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClassifierShape {
    /// Number of rows of the input: one per position.
    pub m: usize,
    /// Number of elements of a row of the input.
    pub d: usize,
    /// Number of classes: the size of the vocabulary.
    pub v: usize,
    /// Softcap of the logits. With `Some(cap)`, a logit `l` becomes `cap·tanh(l / cap)`.
    pub softcap: Option<f32>,
}

/// Label of a position that has no loss, such as a token of a prompt.
pub const IGNORE_LABEL: u32 = u32::MAX;

/// The buffers for the gradients of the classifier's input and of the output layer's weight, and
/// the factor that scales both gradients.
pub struct ClassifierGrads<'a> {
    /// Gradient of the classifier's input, `[m, d]`; overwritten.
    pub dx: ViewMut<'a>,
    /// Gradient of the output layer's weight, `[v, d]`; empty if it is not needed.
    pub dw: ViewMut<'a>,
    /// Whether `dw` is overwritten or added to.
    pub dw_write: WriteMode,
    /// Factor by which the gradient of the logits is multiplied.
    pub scale: f32,
}

impl ClassifierShape {
    /// Panics if a label is neither below the vocabulary size nor [`IGNORE_LABEL`], or if an
    /// argument of the classifier has a wrong number of elements. `loss`, `x` and `w` are lengths.
    pub(crate) fn check_arguments(
        &self,
        [loss, x, w]: [usize; 3],
        labels: &[u32],
        grads: Option<&ClassifierGrads>,
    ) {
        let (op, ClassifierShape { m, d, v, .. }) = ("classifier", *self);
        assert!(v > 0 && d > 0, "{op}: the vocabulary ({v}) and the model ({d}) must not be empty");
        expect_lens(op, [("loss", loss, m), ("x", x, m * d), ("w", w, v * d), ("labels", labels.len(), m)]);
        let outside = labels.iter().find(|&&l| l != IGNORE_LABEL && l as usize >= v);
        assert!(outside.is_none(), "{op}: label {outside:?} is not below the vocabulary size {v}");
        if let Some(g) = grads {
            let dw_len = if g.dw.is_empty() { 0 } else { v * d };
            expect_lens(op, [("dx", g.dx.len(), m * d), ("dw", g.dw.len(), dw_len)]);
        }
    }
}
