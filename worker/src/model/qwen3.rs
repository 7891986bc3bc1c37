//! Qwen 3: RMSNorm of each head of q and k; layers may slide.
use super::{Family, config::Fields, decoder};
use serde_json::json;

pub(super) const FAMILY: Family = Family {
    name: "qwen3",
    architecture: "Qwen3ForCausalLM",
    build: |config, tokens| {
        let f = Fields::new(config);
        // Its default isn't hidden_size / num_attention_heads, so that a file without it is not complete.
        f.size("head_dim")?;
        let mut n = decoder::Numbers::read(&f)?;
        let bias = f.flag("attention_bias")?;
        (n.qkv_bias, n.o_bias, n.qk_norm) = (bias, bias, true);
        n.read_sliding_layers(&f)?;
        f.finish()?;
        Ok(decoder::build(n, config, tokens))
    },
    describe: |spec| {
        let own = json!({"attention_bias": false, "use_sliding_window": false, "sliding_window": null});
        decoder::describe(spec, "qwen3", "Qwen3ForCausalLM", own)
    },
    dropout: &[decoder::DROPOUT],
};
