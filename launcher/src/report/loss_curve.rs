//! [`LossCurve`]: plots the losses of a run in braille characters.

/// The width of the plot of a run's losses, in characters. A braille character has 2 × 4 dots.
const PLOT_COLUMNS: usize = 60;
/// The height of the plot of a run's losses, in characters.
const PLOT_ROWS: usize = 8;
/// The largest number of losses that are stored for the plot of a run. If there are more,
/// neighboring points are averaged in pairs.
const MAX_POINTS: usize = 1 << 16;

/// The losses of all steps of a run, which are plotted as a curve of braille characters. If the run
/// has more than [`MAX_POINTS`] steps, the losses of neighboring steps are averaged.
#[derive(Debug, Default)]
pub(super) struct LossCurve {
    points: Vec<(u64, f64)>,
}

impl LossCurve {
    /// Adds the loss of step `step` to the plot. Ignores NaN and infinite losses.
    pub(super) fn push_loss(&mut self, step: u64, loss: f64) {
        if loss.is_finite() {
            self.points.push((step, loss));
        }
        if self.points.len() > MAX_POINTS {
            let pair = |p: &[(u64, f64)]| {
                let mean = p.iter().map(|(_, loss)| loss).sum::<f64>() / p.len() as f64;
                (p[p.len() - 1].0, mean)
            };
            self.points = self.points.chunks(2).map(pair).collect();
        }
    }

    /// Returns the plot of a run's losses as lines of braille characters, from top to bottom.
    /// Returns no lines if there are fewer than two steps.
    pub(super) fn draw_lines(&self) -> Vec<String> {
        let (Some(first), Some(last)) = (self.points.first(), self.points.last()) else { return Vec::new() };
        if self.points.len() < 2 || first.0 == last.0 {
            return Vec::new();
        }
        let low = self.points.iter().map(|p| p.1).fold(f64::INFINITY, f64::min);
        let high = self.points.iter().map(|p| p.1).fold(f64::NEG_INFINITY, f64::max);
        let span = if high > low { high - low } else { 1.0 };
        let (width, height) = (2 * PLOT_COLUMNS - 1, 4 * PLOT_ROWS - 1);
        let steps = last.0.saturating_sub(first.0).max(1) as f64;
        let position = |(step, loss): (u64, f64)| {
            let x = step.saturating_sub(first.0) as f64 / steps * width as f64;
            (x.clamp(0.0, width as f64), (high - loss) / span * height as f64)
        };
        let mut cells = vec![[0u8; PLOT_COLUMNS]; PLOT_ROWS];
        for pair in self.points.windows(2) {
            let ((x0, y0), (x1, y1)) = (position(pair[0]), position(pair[1]));
            let dots = (x1 - x0).abs().max(1.0).round() as usize;
            for i in 0..=dots {
                let share = i as f64 / dots as f64;
                let x = (x0 + share * (x1 - x0)).round() as usize;
                let y = (y0 + share * (y1 - y0)).round() as usize;
                // Braille dots 1-3 and 4-6 are the upper three rows of the two columns; 7 and 8 are
                // the last row.
                let bit = [[0, 1, 2, 6], [3, 4, 5, 7]][x % 2][y % 4];
                cells[y / 4][x / 2] |= 1 << bit;
            }
        }
        let braille = |bits: &u8| char::from_u32(0x2800 + u32::from(*bits)).unwrap_or(' ');
        let label = |row: usize| match row {
            0 => format!("{high:8.4}"),
            r if r == PLOT_ROWS - 1 => format!("{low:8.4}"),
            _ => " ".repeat(8),
        };
        let line = |(row, cells): (usize, &[u8; PLOT_COLUMNS])| {
            format!("{} ┤{}", label(row), cells.iter().map(braille).collect::<String>()).trim_end().to_owned()
        };
        let mut lines: Vec<String> = cells.iter().enumerate().map(line).collect();
        let (left, right) = (format!("step {}", first.0), last.0.to_string());
        let gap = PLOT_COLUMNS.saturating_sub(left.len() + right.len());
        lines.push(format!("    loss └{left}{}{right}", " ".repeat(gap)));
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns for each character of a plotted line whether the character has dots.
    fn find_dots(line: &str) -> Vec<bool> {
        line.chars().skip(10).map(|c| c as u32 > 0x2800).collect()
    }

    #[test]
    fn a_falling_loss_is_plotted_from_top_left_to_bottom_right() {
        let mut curve = LossCurve::default();
        (0..=100).for_each(|i| curve.push_loss(i, 5.0 - 0.04 * i as f64));
        let lines = curve.draw_lines();
        assert_eq!(lines.len(), PLOT_ROWS + 1);
        assert!(find_dots(&lines[0])[0] && find_dots(&lines[PLOT_ROWS - 1])[PLOT_COLUMNS - 1]);
        assert!(!find_dots(&lines[PLOT_ROWS - 1])[0]);
        insta::assert_snapshot!(lines.join("\n"));
    }

    #[test]
    fn unusual_values_are_plotted_without_panic() {
        let mut curve = LossCurve::default();
        assert!(curve.draw_lines().is_empty());
        curve.push_loss(7, f64::NAN);
        curve.push_loss(7, 2.0);
        assert!(curve.draw_lines().is_empty(), "one point is not enough");
        curve.push_loss(8, 2.0);
        curve.push_loss(u64::MAX, 2.0);
        curve.push_loss(3, -1e300);
        assert_eq!(curve.draw_lines().len(), PLOT_ROWS + 1);
    }

    #[test]
    fn very_long_runs_are_averaged_and_keep_their_last_step() {
        let mut curve = LossCurve::default();
        (1..=200_000).for_each(|i| curve.push_loss(i, 1.0));
        assert!(curve.points.len() <= MAX_POINTS);
        assert_eq!(curve.points.last().map(|p| p.0), Some(200_000));
    }
}
