//! The one table that a run prints: the machine, the date and the command above it; a baseline beside each figure.

use std::fmt::Write as _;
use std::fs;
use std::time::Duration;

use super::site::Site;

/// One measured figure.
#[derive(Debug, Clone)]
pub struct Figure {
    name: String,
    ours: String,
    baseline: String,
    compared: String,
    target: String,
    met: Option<bool>,
}

impl Figure {
    /// A speed, and the least part of the baseline's speed that it is to have.
    pub fn speed(name: impl Into<String>, unit: &str, ours: f64, baseline: (&str, f64), least: f64) -> Self {
        let ratio = ours / baseline.1;
        Self {
            name: name.into(),
            ours: format!("{} {unit}", grouped(ours)),
            baseline: format!("{} {unit} ({})", grouped(baseline.1), baseline.0),
            compared: format!("{ratio:.2}"),
            target: format!("≥ {least}"),
            met: Some(ratio >= least),
        }
    }

    /// A time, and the greatest multiple of the baseline's that it is to have.
    pub fn time(name: impl Into<String>, ours: Duration, baseline: (&str, Duration), most: f64) -> Self {
        let ratio = ours.as_secs_f64() / baseline.1.as_secs_f64();
        Self {
            name: name.into(),
            ours: milliseconds(ours),
            baseline: format!("{} ({})", milliseconds(baseline.1), baseline.0),
            compared: format!("{ratio:.2}"),
            target: format!("≤ {most}"),
            met: Some(ratio <= most),
        }
    }

    /// Memory beside what an idle process has, both in octets.
    pub fn memory(name: impl Into<String>, peak: u64, idle: u64, most_added: Option<u64>) -> Self {
        let added = peak.saturating_sub(idle);
        Self {
            name: name.into(),
            ours: mebibytes(peak),
            baseline: format!("{} (idle)", mebibytes(idle)),
            compared: format!("+ {}", mebibytes(added)),
            target: most_added.map_or_else(|| "—".to_owned(), |most| format!("≤ + {}", mebibytes(most))),
            met: most_added.map(|most| added <= most),
        }
    }

    /// The figure in one line, for who watches.
    pub fn line(&self) -> String {
        format!("{}: {}, baseline {}: {} (target {})", self.name, self.ours, self.baseline, self.compared, self.target)
    }
}

/// The table.
#[derive(Debug)]
pub struct Table {
    command: String,
    machine: Option<String>,
    figures: Vec<Figure>,
}

impl Table {
    pub(super) fn new(command: String) -> Self {
        Self { command, machine: None, figures: Vec::new() }
    }

    /// Learn about machine and server, once.
    pub(super) fn describe(&mut self, site: &Site) -> anyhow::Result<()> {
        if self.machine.is_none() {
            let cpu = field("/proc/cpuinfo", "model name").unwrap_or_else(|| "unknown processor".to_owned());
            let memory = field("/proc/meminfo", "MemTotal").and_then(|text| kibibytes(&text)).unwrap_or_default();
            let cores = std::thread::available_parallelism()?;
            let version = site.source.text("show server_version")?;
            let date = site.source.text("select to_char(now() at time zone 'utc', 'YYYY-MM-DD HH24:MI')")?;
            self.machine = Some(format!(
                "{cpu}, {cores} cores, {} memory, PostgreSQL {version} (fsync on, shared_buffers 1 GB), {date} UTC",
                mebibytes(memory)
            ));
        }
        Ok(())
    }

    pub(super) fn add(&mut self, figure: Figure) {
        self.figures.push(figure);
    }

    /// Whether a target was missed.
    pub fn misses(&self) -> bool {
        self.figures.iter().any(|figure| figure.met == Some(false))
    }

    /// The table in Markdown.
    pub fn markdown(&self) -> String {
        let mut out = String::new();
        let machine = self.machine.as_deref().unwrap_or("nothing was measured");
        let _ = writeln!(out, "`{}` on {machine}\n", self.command);
        out.push_str(
            "| figure | Tributary | baseline | compared | target | met |\n| --- | ---: | ---: | ---: | ---: | --- |\n",
        );
        for figure in &self.figures {
            let Figure { name, ours, baseline, compared, target, met } = figure;
            let met = match met {
                Some(true) => "yes",
                Some(false) => "**no**",
                None => "—",
            };
            let _ = writeln!(out, "| {name} | {ours} | {baseline} | {compared} | {target} | {met} |");
        }
        out
    }
}

/// The value of the first line `name: value` of a file of such lines.
pub(super) fn field(path: &str, name: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let mut lines = text.lines().filter_map(|line| line.split_once(':'));
    lines.find(|(found, _)| found.trim() == name).map(|(_, value)| value.trim().to_owned())
}

/// Octets of a size that the kernel gives as `n kB`.
pub(super) fn kibibytes(text: &str) -> Option<u64> {
    Some(text.strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}

fn milliseconds(time: Duration) -> String {
    format!("{:.1} ms", time.as_secs_f64() * 1000.0)
}

fn mebibytes(octets: u64) -> String {
    format!("{:.0} MiB", octets as f64 / f64::from(1 << 20))
}

/// A count with a comma between thousands.
fn grouped(number: f64) -> String {
    let digits = format!("{number:.0}");
    let mut out = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index) % 3 == 0 {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_says_whether_its_target_is_met() {
        let mut table = Table::new("bench".to_owned());
        table.add(Figure::speed("drain", "rows/s", 1_234_567.0, ("native", 2_469_134.0), 0.5));
        table.add(Figure::time("latency", Duration::from_millis(3), ("native", Duration::from_millis(1)), 2.0));
        table.add(Figure::memory("memory", 110 << 20, 10 << 20, Some(100 << 20)));
        let text = table.markdown();
        assert!(
            text.contains("| drain | 1,234,567 rows/s | 2,469,134 rows/s (native) | 0.50 | ≥ 0.5 | yes |"),
            "{text}"
        );
        assert!(text.contains("| latency | 3.0 ms | 1.0 ms (native) | 3.00 | ≤ 2 | **no** |"), "{text}");
        assert!(text.contains("| memory | 110 MiB | 10 MiB (idle) | + 100 MiB | ≤ + 100 MiB | yes |"), "{text}");
        assert!(table.misses());
    }

    #[test]
    fn the_kernels_sizes_are_read() {
        assert_eq!(kibibytes("1536 kB"), Some(1536 * 1024));
        assert_eq!(kibibytes("1536"), None);
    }
}
